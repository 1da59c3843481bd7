"""What a machine will do with a model: a performance model, a search for policies, predictions of published figures.

No torch here: a plan is made in a second, on any machine. Layers, bottom up: machine.py (seconds that a
machine takes), work.py (what a pass asks for), memory.py (what must fit), style.py (how engines work), closed_form.py
(a policy's throughput), search.py (the best policy). For our engine with_device.py and host_only.py place as it does.
"""
