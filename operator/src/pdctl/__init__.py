"""The command pdctl (also `kubectl pd`): local clusters, previews, explanations, replays, bench."""

__version__ = "0.1.0"
