"""Links of a given rate and delay between the ranks of a launch: network namespaces on this host."""
