"""The only room with torch: loading, the paged KV cache, attention, sampling."""

import os

# Several workers may share a machine's cores.  OpenMP threads that spin while they wait for one
# another then take the cores from those they wait for: two workers with two threads each on two
# cores ran about 16 times fewer steps (measured, on a machine with other work).  OpenMP reads this once, when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
