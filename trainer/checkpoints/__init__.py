"""Save, verify, resume: a checkpoint is a folder `step_N`, written while training goes on.

    trained.py      a learner's models and optimizers as parts: named tensors
    snapshot.py     parts -> shards in host memory, the only moment in which training waits
    fill.py         shards -> files: one rank writes whole tensors, several write a file of blocks each (distributed.py)
    store.py        files -> step_N.tmp-<incarnation>/ -> manifest -> rename -> step_N/  <- latest
    search.py       the newest one that is whole
    restore.py      files -> learner, on any number of ranks
    whole.py        files of several ranks -> one model, as Hugging Face has it

`step_N/` holds safetensors, state.json, the model's config and tokenizer files, and manifest.json. There is no pickle
in it. From one rank model.safetensors is whole and the folder loads as a Hugging Face model; from several there is a
rank-0-of-4.model.safetensors and so on. With trainer.lora it is small: instead of the model the adapter, as PEFT has
it, and in state.json what the adapter belongs to.
"""
