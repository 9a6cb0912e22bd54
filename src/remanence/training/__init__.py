"""How clients and the server train, and how replies are checked. Knows no transport.

Begin with `client_step.py`: one client's local training, from the model it receives to the
reply it sends. Every function there works on one client and has no side effects; the engines
call it for one client at a time or map it over a stack of clients.

    task            `TrainingTask`: model, method, data and phases, fixed for a whole run
    client_step     what a client does before, in and after its local steps
    loss            the training loss: the method's loss, loss terms and regularizers
    gradients       the two ways to differentiate: autograd and `torch.func`
    client_ops      `ClientOps`: what client-side functions of a method may call
    per_example     gradients of single examples, for DP-SGD
    gate            checks every reply before the server uses it
    reply_schema    names, shapes and dtypes of a valid reply
    server_step     aggregation: from replies to the next global model
    server_training `ServerOps`: training at the server on its public set
    server_capture  captures or compiles the steps of that training
    state           `RunState`: everything that survives a round

Imports core, data, kernels, aggregators and `privacy.label_dp`; never an engine.
"""
