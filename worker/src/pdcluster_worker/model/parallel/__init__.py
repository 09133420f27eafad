"""One model over several rank processes: tensor-parallel shares of each layer, pipeline stages of layers."""
