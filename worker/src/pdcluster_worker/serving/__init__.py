"""A request's life on one worker: joins routing decisions, peers and the engine."""
