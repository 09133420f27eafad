"""Roll outs: the revision that serves, the next step, and the clock that gives one up."""
