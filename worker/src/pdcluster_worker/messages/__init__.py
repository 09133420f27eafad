"""Data that rooms and processes exchange: between server and engine process, between peers, and
from the config to the engine.
"""
