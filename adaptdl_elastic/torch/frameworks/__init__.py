"""Make other training frameworks elastic. Each has a module, which only its users import.

    from adaptdl_elastic.torch.frameworks.huggingface import Trainer, TrainingArguments

docs/frameworks.md says which features of each framework work. Adapters use only public names of the library.
"""
