"""The command pdctl, which is `kubectl pd` too: clusters on this machine, previews, explanations,
replays and benches.
"""
