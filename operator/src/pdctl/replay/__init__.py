"""The autoscaler over a load trace, on a simulated cluster."""
