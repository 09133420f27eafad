"""One model over several rank processes: tensor and pipeline parallel."""
