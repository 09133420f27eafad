"""The choice of a decode worker by policy: one file for each family of policies, one interface
(`policies`).
"""
