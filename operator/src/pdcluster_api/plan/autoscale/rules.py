"""Names of the autoscaler's rules, as steps of a decision show them, and its fixed numbers."""

from typing import Final

from pdcluster_schema.backoff import Backoff

METRICS: Final = "metrics"  # what is known of a role
CAPACITY: Final = "capacity"  # nodes, quotas and what they have refused
WAKE: Final = "wake"  # of a cluster that sleeps: its first workers
NEED: Final = "need"  # what the signals ask for
HEADROOM: Final = "headroom"
SAFETY: Final = "safety"  # what the workers that stay would carry
PENDING: Final = "pending"  # workers that are on their way
TOLERANCE: Final = "tolerance"
WINDOW: Final = "window"  # how long every decision must have agreed
MAX_STEP: Final = "maxStep"
BOUNDS: Final = "bounds"  # min and max of a pool, by schedules where one is on
# no role serves without the other, or loses its last ready worker
NEVER_ALONE: Final = "neverAlone"
RATIO: Final = "ratio"
BUDGET: Final = "budget"  # accelerators in all and by type
SLEEP: Final = "sleep"  # all roles to zero, for want of requests
POOL: Final = "pool"  # which pool of a role grows or shrinks
FLIP: Final = "flip"  # a worker of a flexible pool takes the other role
FLIP_BACK: Final = "flipBack"  # it takes its own again

# The least time for which one role must have missed a worker that the other can spare, and how many
# times the last flip's own time: a change of role that is taken back costs twice
FLIP_SECONDS: Final = 60.0
FLIP_COST: Final = 2.0

# After this time, or the window of a scale down if that is longer, a worker that has not drained
# keeps its role, where rollout.drainTimeoutSeconds sets no limit
FLIP_LIMIT_SECONDS: Final = 600.0

# The next flip waits so long after it, twice as long for each more that has not drained
FLIP_RETRY: Final = Backoff(first=3600.0, most=86400.0)

# Rounds of scrapes after which a new worker is thought to carry its part; its source gives a new
# decode worker as many intervals
GRACE_ROUNDS: Final = 3

# Rounds of scrapes that are kept: gauges are means over the last few, percentiles of as many as it
# takes for enough samples
MAX_ROUNDS: Final = 60

# Multiple of its settled workers that a role may ask for because of a queue or a latency, which can
# be any number of times its threshold
MAX_GROWTH: Final = 2.0

# A queue that falls under its threshold this soon asks for no worker: its source's three intervals
# of 30 s
WORK_OFF_SECONDS: Final = 90.0

# Samples that a percentile wants: so many in all, and so many that are expected to be above it
LEAST_SAMPLES: Final = 20
LEAST_ABOVE: Final = 5

# Of the factor by which predicted latencies are corrected: how many times it may be wrong, and what
# the newest observation weighs
CORRECTION_LIMIT: Final = 2.0
CORRECTION_WEIGHT: Final = 0.5
