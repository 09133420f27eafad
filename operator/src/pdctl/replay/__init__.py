"""The autoscaler over a trace: a simulated cluster in place of a real one, and the decisions of
`plan.autoscale` on it.
"""
