// Changes of a list in place, so that a screen reader keeps its position in it.

/** Make the elements of a list equal to new ones; what did not change is not touched. */
export function redraw(list, made) {
  made.forEach((each, index) => {
    const there = list.children[index];
    if (there) update(there, each);
    else list.append(each);
  });
  while (list.children.length > made.length) list.lastElementChild.remove();
}

function update(there, made) {
  if (there.isEqualNode(made)) return;
  const isAlike = there.nodeName === made.nodeName &&
    there.childNodes.length === made.childNodes.length;
  if (!isAlike) return there.replaceWith(made);
  if (made.nodeType === Node.TEXT_NODE) {
    if (there.data !== made.data) there.data = made.data;
    return;
  }
  for (const { name, value } of made.attributes) {
    if (name === "style") there.style.cssText = value; // the attribute is not allowed to change
    else if (there.getAttribute(name) !== value) there.setAttribute(name, value);
  }
  [...there.childNodes].forEach((child, index) => update(child, made.childNodes[index]));
}
