"""Quality of service, pure: priorities, estimates, admission, degradation and the limits of
tenants.
"""
