"""Quality of service: priorities, admission, degradation and tenant limits."""
