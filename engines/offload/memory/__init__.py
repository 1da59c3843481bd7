"""What goes where, decided before anything is loaded. Imports no torch."""
