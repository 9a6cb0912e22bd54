"""From the settings that users write to the objects of a run.

`build` is the place to start: it loads and partitions the data, makes the model and the method,
joins them to a training task and checks that everything fits together. An experiment that can be
built can be run.

    build          BuiltExperiment, and the steps that make it
    data_setup     load the data, partition them among clients and time steps, poison attackers'
    networks       make the model and apply a method's changes to it
    system         simulated speeds of clients, and deadlines for their replies
    torch_setup    device, precision and determinism
    privacy_checks do privacy mechanisms cover what the method sends?
    task_checks    can this model be trained on these data, with these settings?
    hints          settings that are valid and do less than they seem to
    run_sizes      the sizes of a run, by its settings and by its task
    resources      what a run of these sizes needs: memory, disk, processes, threads, steps
    metadata       what a run folder stores about versions, data and defaults

May import everything below: engines, training, methods and their parts, data, models, core.
"""
