-- Health of a PDCluster for Argo CD, which runs this with the object as `obj`.
-- The same answers as kstatus, which Flux and `kubectl wait` go by: Stalled is Degraded, Ready is Healthy, all else is on its way.
local function condition(type)
  for _, found in ipairs(obj.status.conditions or {}) do
    if found.type == type then
      return found
    end
  end
  return nil
end

local function is_true(found)
  return found ~= nil and found.status == "True"
end

local function health(status, found, fallback)
  local message = fallback
  if found ~= nil and found.message ~= nil and found.message ~= "" then
    message = found.message
    if found.reason ~= nil and found.reason ~= "" then
      message = found.reason .. ": " .. message
    end
  end
  return {status = status, message = message}
end

if obj.metadata.deletionTimestamp ~= nil then
  return {status = "Progressing", message = "is being deleted"}
end
if obj.status == nil or obj.status.conditions == nil then -- a new object's status is observedGeneration -1 and nothing else
  return {status = "Progressing", message = "waits for the operator: is it running, and does it watch this namespace?"}
end
if obj.status.observedGeneration ~= obj.metadata.generation then
  return {status = "Progressing", message = "waits for the operator to see the last change"}
end

local ready = condition("Ready")
local stalled = condition("Stalled")
local reconciling = condition("Reconciling")

if is_true(stalled) then
  return health("Degraded", stalled, "needs a user")
end
if is_true(reconciling) then
  return health("Progressing", reconciling, "is being changed")
end
if is_true(ready) then
  return health("Healthy", ready, "all is as declared")
end
return health("Progressing", ready, "is not ready yet")
