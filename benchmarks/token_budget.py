"""Token positions, time and memory for texts of different lengths, with 8 texts or a budget of tokens per micro-batch.

A small BERT reads texts in steps of 64. Their lengths are log-normally distributed (median 180 tokens, sigma 0.8,
at most 1024). The table has the number of token positions (tokens and padding) that the model computes in training,
divided by the number of tokens; the processor time, relative to `micro_batch_size=8`; and the peak memory of the
tensors that one step creates (benchmarks/live.py).

`python -m benchmarks.token_budget [--rounds 3]` takes a few minutes. The page token_budget shows the result.
"""
import argparse, math, time
import benchmarks
from benchmarks import live
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification
from fastai.callback.core import Callback, CancelValidException
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import SGD
from fastaccum import GradientAccumulation, TokenBudget

bs,n_steps,budget = 64,2,8192

class Bert(nn.Module):
    "A classifier of texts that counts the token positions that it computes in training"
    def __init__(self):
        super().__init__()
        self.model = BertForSequenceClassification(BertConfig(vocab_size=1000, hidden_size=64, num_hidden_layers=2,
            num_attention_heads=2, intermediate_size=256, max_position_embeddings=1024))
        self.positions = 0
    def forward(self, b):
        if torch.is_grad_enabled(): self.positions += b['input_ids'].numel()
        return self.model(**b).logits

def random_text():
    n = round(math.exp(torch.randn(()).item()*.8)*180)
    return torch.randint(1, 1000, (min(max(n, 8), 1024),)),torch.randint(0, 2, ())

def collate(items):
    ids = nn.utils.rnn.pad_sequence([x for x,_ in items], batch_first=True)
    return dict(input_ids=ids, attention_mask=(ids!=0).long()),torch.stack([y for _,y in items])

class NoValidation(Callback):
    def before_validate(self): raise CancelValidException

def learner(texts, loader_bs):
    torch.manual_seed(0)
    dls = DataLoaders(*[DataLoader(texts, bs=loader_bs, create_batch=collate)]*2)
    return benchmarks.quiet(Learner(dls, Bert(), nn.CrossEntropyLoss(), opt_func=SGD, cbs=NoValidation()))

def fit(texts, loader_bs, size, n=n_steps):
    "Take `n` steps; return the seconds, and the number of token positions that the model computed"
    learn = learner(texts[:n*bs], loader_bs)
    start = time.process_time()
    learn.fit(1, 1e-3, cbs=GradientAccumulation(bs, micro_batch_size=size and size()))
    return time.process_time()-start,learn.model.positions

ways = {'`bs=64`, `micro_batch_size=8`':(64,lambda: 8), '`bs=8`, `GradientAccumulation(64)`':(8,None),
    f'`bs=64`, `micro_batch_size=TokenBudget({budget})`':(64,lambda: TokenBudget(budget))}

def main():
    args = argparse.ArgumentParser()
    args.add_argument('--rounds', type=int, default=3)
    args = args.parse_args()
    torch.manual_seed(1)
    texts = [random_text() for _ in range(n_steps*bs)]
    n_tokens = sum(len(x) for x,_ in texts)
    secs = benchmarks.by_turns({k:lambda o=o: fit(texts, *o)[0] for k,o in ways.items()}, args.rounds)
    first = secs[next(iter(ways))]
    rows = []
    for nm,o in ways.items():
        mib = live.peak_bytes(lambda: fit(texts, *o, n=1))/2**20
        positions,ratio = fit(texts, *o)[1]/n_tokens,benchmarks.median_ratio(secs[nm], first)
        rows.append(dict(way=nm, positions=round(positions, 2), time=round(ratio, 2), mib=round(mib)))
    benchmarks.save('token_budget', dict(made=benchmarks.made(), rows=rows))
    print(benchmarks.table(['','computed positions per token','time','MiB'], [o.values() for o in rows]))

if __name__=='__main__': main()
