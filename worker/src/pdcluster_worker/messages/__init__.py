"""Data that crosses walls: between server and engine process, between peers, and from the config to
the engine.
"""
