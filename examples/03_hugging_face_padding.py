"""Train a Hugging Face model on padded sequences: all labels have the same weight, and padding has none."""
from fastai.text.all import *
from fastaccum import GradientAccumulation  # isort: skip
from transformers import AutoModelForCausalLM, GPT2Config  # pip install transformers

def collate(items):   # pad texts, whose tokens are characters; the labels of padding are -100
    n = max(map(len, items))
    x = tensor([[*map(ord, o), *[0]*(n-len(o))] for o in items])
    return {'input_ids': x, 'attention_mask': (x > 0).long()}, torch.where(x > 0, x, -100)[:, 1:]

class Logits(Module):
    def __init__(self, model): self.model = model
    def forward(self, x): return self.model(**x).logits[:, :-1]

def train(bs, cbs=None):
    set_seed(0)
    dls = DataLoaders(DataLoader(texts[:256], bs=bs, shuffle=True, create_batch=collate),
        DataLoader(texts[256:320], bs=64, create_batch=collate), device=default_device())
    config = GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        # dropout would draw other random numbers for micro-batches
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    learn = Learner(dls, Logits(AutoModelForCausalLM.from_config(config)), CrossEntropyLossFlat())
    learn.fit_one_cycle(2, 1e-2, cbs=cbs)
    return learn.recorder.values[-1][1]

# the model learns to count: each text has 4 to 40 successive numbers, such as '7 8 9 10'
texts = [' '.join(map(str, range(i % 100, i % 100+4+(i % 7)**2))) for i in range(320)]
ours, full = train(16, GradientAccumulation(64)), train(64)
assert abs(ours-full) < 1e-3*full
print(f'validation loss {ours:.4f} in micro-batches of 16, {full:.4f} in batches of 64')
