"""What all packages share: values, the slots of a method, the protocol of an engine, and tools.

    types         batches, models, replies, and what is known of a task
    slots         `Part` and `Method`: the functions of a method, and what they read and call
    declarations  what a part reveals, the noise it draws, the forgetting it reduces
    compose       parts joined by `+`, checked and bound to their own state
    engine        the protocol between rounds and engines
    model         a user's network as a pure function of its parameters
    pytree, rng   trees of tensors, and randomness as a function of keys

Begin with `slots`. This package imports no other package of remanence.
"""
