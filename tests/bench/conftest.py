"""The bench is a folder of scripts, not a package: its modules are imported as `bench/run.py`
imports them.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
