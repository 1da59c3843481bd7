"""`harness serve`: an online engine behind OpenAI's HTTP interface."""
