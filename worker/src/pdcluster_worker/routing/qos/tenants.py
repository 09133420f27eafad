"""What each tenant may use: the limits of its API key."""

from pdcluster_worker.config import PolicyConfig
from pdcluster_worker.qos_config import TenantPolicy


def tenant_policy(policy: PolicyConfig, tenant: str) -> TenantPolicy:
    """The limits of a tenant: its own, else those of all others."""
    return policy.tenants.get(tenant, policy.tenant_defaults)
