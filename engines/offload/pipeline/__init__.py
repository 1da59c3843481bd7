"""One model on several machines or processes: each rank holds some of the layers, and hidden states travel between."""
