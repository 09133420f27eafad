"""The command pdctl (also `kubectl pd`): local clusters, previews, explanations, replays, bench."""
