"""Train with a contrastive loss: the loss compares all 256 samples, and the model sees 32 at a time."""
from fastai.vision.all import *
from fastaccum import GradientCache  # isort: skip
from sklearn.datasets import load_digits

class TwoViews(Module):
    "Returns the embeddings of each image and of a copy that is moved by one pixel"
    def __init__(self, body): self.body = body
    def forward(self, x): return torch.stack([self.body(x), self.body(x.roll(1, -1))], dim=1)

def info_nce(pred, targ):
    "Return the cross-entropy of finding the second view of each image among those of all images"
    a, b = F.normalize(pred, dim=-1).unbind(1)
    return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a), device=a.device))

def train(cbs=None):
    set_seed(0)
    dls = DataLoaders(DataLoader(items, bs=256, shuffle=True), DataLoader(items, bs=256), device=default_device())
    body = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16*36, 32))
    learn = Learner(dls, TwoViews(body), info_nce)
    learn.fit_one_cycle(2, 1e-2, cbs=cbs)
    return learn.recorder.values[-1][1]

items = [(tensor(x)[None].float()/16, 0) for x in load_digits().images[:1024]]
# without the callback, the model sees all 256
cached, full = train(GradientCache(micro_batch_size=32)), train()
assert abs(cached-full) < 1e-3*full
print(f'validation loss {cached:.4f} in micro-batches of 32, {full:.4f} in whole batches of 256')
