"""Keep the effective batch size of 256 when memory runs out: fastaccum splits the batch and goes on."""
from fastai.vision.all import *
from fastaccum import GradientAccumulation  # isort: skip
from sklearn.datasets import load_digits

class SmallMemory(Module):
    "Runs out of memory with more than 100 samples, as a GPU might; leave this layer out of your model"
    def forward(self, x):
        if self.training and len(x) > 100: raise torch.OutOfMemoryError(f'{len(x)} samples are too many')
        return x

def train(*layers, cbs=None):
    set_seed(0)
    dls = DataLoaders(DataLoader(items[:1408], bs=256, shuffle=True), DataLoader(items[1408:], bs=256),
        device=default_device())
    model = nn.Sequential(*layers, nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    learn = Learner(dls, model, CrossEntropyLossFlat(), metrics=accuracy)
    learn.fit_one_cycle(3, 0.02, cbs=cbs)
    return learn.recorder.values[-1][1]

items = [(tensor(x).float()/16, int(y)) for x, y in zip(*load_digits(return_X_y=True))]
split = train(SmallMemory(), cbs=GradientAccumulation(256, micro_batch_size='auto'))
full = train()   # the same training with enough memory for 256 samples
assert abs(split-full) < 1e-3*full
print(f'validation loss {split:.4f} with the memory of 100 samples, {full:.4f} with that of 256')
