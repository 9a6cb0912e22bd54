"""The folder of a run: formats of its files, readers that check them, and checkpoints.

Read `run.py` first: `Run` and `Comparison` read everything a run folder holds.

    run                 Run and Comparison; the names of the files
    columns             the columns of metrics.jsonl
    client_names        the sites that clients are
    ledger              the ledger and the other files of fixed-width records
    readers             read and check files, which may come from another person
    outcome             did a run learn anything, did it diverge?
    summary             accuracy, loss and macro F1 from a confusion matrix
    manifest            which files belong to a checkpoint, and their hashes
    checkpoint          save and load the state of a run; checkpoint_codec: as tensors and bytes;
                        checkpoint_schema: does a state belong to an experiment?
    trained_model       the trained model of a run as an nn.Module

May import experiment and everything below; `rounds` writes what is read here.
"""
