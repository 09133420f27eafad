"""Numbers beyond the greatest value of their fields: (change, the model's fault, the API server's
field).
"""

from tests.schema.greatest_values import GREATEST
from tests.schema.object_cases import Change, at

WRONG_NUMBERS: list[tuple[Change, str, str]] = [
    (at(path, most + add), f"{path}: must be at most {most}, not {most + add}; lower it", path)
    for path, most in GREATEST.items()
    for add in (1, (1 << 62))
]
