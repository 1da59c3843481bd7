"""A suite file: YAML with positions, checked and expanded into cells."""
