"""One model over several rank processes: shares of each layer, and stages of layers."""
