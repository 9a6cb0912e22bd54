"""What all packages share: values, the slots of a method, the protocol of an engine, and tools.

Methods:
    slots           `Part` and `Method`: the slots that the functions of a method fill
    contexts        what these functions can read and call
    declarations    what a part reveals, the noise it draws, the forgetting it reduces
    compose         parts joined by `+`, bound to their own state
    compose_checks  do the parts of a method fit together?
    expressions     names with arguments, such as `fedprox(mu=0.1)+wsm`
    imports         names outside of this package: import paths and entry points
    ranges          range checks of hyper-parameters
Values:
    types           batches, models, replies, and what is known of a task
    pytree          arithmetic on trees of tensors
    rng             random numbers as a function of keys
    remote_params   parameters that stay with the workers of an engine
Models and engines:
    engine          the protocol between rounds and engines
    model           a user's network as a pure function of its parameters
    model_layers    its layers: keyed dropout, norms, the head, their order
    model_outputs   its logits in any wrapping, and random numbers that are not keyed
    memory_format   networks that fail on channels-last images
The process and its files:
    errors          the errors that are raised on purpose
    progress        the progress display of a run
    notebook        the same in the output of a notebook's cell
    log_file        the same in a file of the run
    preparation     what is compiled or captured before training, for the display
    safe_path       files of a folder that may come from another person; atomic writes
    temporary_files what a write makes before it has its name, and a killed one leaves
    files           output folders and their locks, hashes
    signals         SIGTERM as an exception
    process_state   restores the settings of the process after a run
    hardware        the name of the machine
    memory          the limit on what reading a file may take

Begin with `slots`. This package imports no other package of remanence.
"""
