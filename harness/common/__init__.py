"""Small modules that every package may use: units, files, memory of the host, the compiler, the roofline."""
