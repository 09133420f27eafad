"""Pure policy: offload decision, credits, scores, prefix index."""
