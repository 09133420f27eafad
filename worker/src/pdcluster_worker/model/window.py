"""Which part of its context a model's layers see, as config.json says.

Only a window that every layer has lets the engine give KV blocks back early
(`engine.block_table`): a block holds the keys and values of all layers.
"""

from collections.abc import Mapping
from typing import Any


def window_of_every_layer(config: Mapping[str, Any], max_model_len: int) -> int | None:
    """Tokens that one attends to, itself included, in each layer; None where a layer sees all.

    >>> window_of_every_layer({"sliding_window": 4096}, 32768)
    4096
    >>> window_of_every_layer({"sliding_window": 4096, "layer_types": ["sliding_attention", "full_attention"]}, 32768)
    """
    window: int | None = config.get("sliding_window")
    if not window or window >= max_model_len:
        return None
    layer_types = config.get("layer_types")
    if layer_types:
        return window if set(layer_types) == {"sliding_attention"} else None
    return None if config.get("use_sliding_window") is False else window
