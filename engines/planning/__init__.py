"""What a machine will do with a model: a performance model, a search for policies, predictions of published figures.

No torch here: a plan takes seconds on any machine. Modules from the bottom up: machine.py (rates of a machine),
workload.py (what a model asks of it), memory.py and flexgen_memory.py (what must fit), engine_cost_models.py (how
engines overlap), closed_form.py and closed_form_planner.py (a policy's throughput by the closed form), placement.py and
rounding.py (the best fractions), search.py (the best policy). In virtual time: pass_walk.py (a pass's operations in
their order), simulator.py and virtual_job.py (a job on a host), virtual_machine.py (a device's resources),
device_pass.py and device_job.py (our engine there), engine_pass.py and simulated_planner.py (other engines),
virtual_pipeline.py (stages and links). planned_job.py is what a planner plans; device_planner.py and host_planner.py
plan memory as our engine does, generate_planner.py as transformers' `generate` does, device_pipeline.py,
offload_device_pipeline.py and host_pipeline.py several stages, and planners.py says which planner a machine has.
"""
