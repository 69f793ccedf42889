"""`miles plan`: predicts the pace of an asynchronous run before anybody pays for it.

    workload   what one trajectory asks of engine and environment
    engine     an engine with continuous batching, in simulated time
    rollout    groups in flight and their buffer; admission, buffer, ledger and router table are the product's own
    simulate   the whole pipeline, one optimiser step after the other
    hardware   rates of a model on a GPU, from its shape and the GPU's data sheet
    measured   rates of a run that took place
    config     what the command reads

The middle is pure: no clocks, files or processes, and equal inputs give equal outputs to the last bit.
"""
