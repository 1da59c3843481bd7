"""Plans where weights, KV cache and activations go before anything is loaded. Imports no torch."""
