"""Make other training frameworks elastic. Each has a module, which only its users import.

| module | question that it answers |
|---|---|
| `huggingface` | How does the Trainer of transformers become elastic? |
| `accelerate` | How does a loop of Hugging Face Accelerate become elastic? |
| `lightning` | How does Lightning's Trainer become elastic? |

    from adaptdl_elastic.torch.frameworks.huggingface import Trainer, TrainingArguments

docs/frameworks.md says which features of each framework work. Adapters use only public names of the library.
"""
