"""Train three times on handwritten digits, from the same weights, in the same order: `make demo`.

The runs are on batches of 256, on micro-batches of 32 with fastaccum, and on micro-batches of 32 with
fastai's own callback.
"""
import os, random, sys, time, warnings
warnings.filterwarnings('ignore', category=FutureWarning)   # torch warns about its own code
# threads slow down such a small model, especially on a busy machine
os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ.setdefault('MPLBACKEND', 'agg')
from pathlib import Path

import matplotlib.pyplot as plt, numpy as np, torch
from sklearn.datasets import load_digits
from fastai.basics import *
from fastai.callback.all import *
from fastai.callback.training import GradientAccumulation as FastaiGradientAccumulation
from fastaccum import GradientAccumulation, ImportOrderWarning
# this script uses fastai's class on purpose
warnings.filterwarnings('ignore', category=ImportOrderWarning)

big,micro,n_epoch = 256,32,12

def load_data():
    "Return items for training and validation: 1,797 images, of which a fifth is for validation"
    digits = load_digits()
    idxs = np.random.default_rng(42).permutation(len(digits.images))
    x,y = tensor(digits.images[idxs]).float()[:,None]/16,tensor(digits.target[idxs])
    cut = len(x)*4//5
    return list(zip(x[:cut], y[:cut])),list(zip(x[cut:], y[cut:]))

def make_learner(bs):
    """Return a Learner with a small convolutional network

    BatchNorm would depend on the micro-batch, so it has none.
    """
    random.seed(42)
    torch.manual_seed(42)
    train,valid = load_data()
    dls = DataLoaders(DataLoader(train, bs=bs, shuffle=True), DataLoader(valid, bs=360))
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
                          nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
                          nn.Flatten(), nn.Linear(32*16, 64), nn.ReLU(), nn.Linear(64, 10))
    return Learner(dls, model, CrossEntropyLossFlat(), metrics=accuracy)

class SamplesSeen(Callback):
    "Counts optimizer steps, and records samples seen at each recorded loss, and the weights after each epoch"
    order,run_valid = Recorder.order+1,False
    def before_fit(self): self.n_steps,self.n_seen,self.at,self.weights = 0,0,[],[]
    def after_step(self): self.n_steps += 1
    def before_batch(self): self.n_seen += len(self.x)   # fastai calls this for each micro-batch
    def after_batch(self):
        if len(self.recorder.losses)>len(self.at): self.at.append(self.n_seen)
    def after_epoch(self): self.weights.append(weights(self.learn))

def train(name, bs, acc):
    "Train with batches of `bs` samples and the callbacks `acc`; return `name` and the Learner"
    print(f'\n{name}')
    learn = make_learner(bs)
    learn.add_cb(SamplesSeen())
    # where no progress bar can be drawn, print only the table that compares the runs
    if not sys.stdout.isatty():
        learn.remove_cb(ProgressCallback)
        learn.logger = noop
    learn.fit_one_cycle(n_epoch, 3e-3, cbs=acc)
    return name,learn

def weights(learn): return torch.cat([p.detach().flatten() for p in learn.model.parameters()])

def losses_at(learn, samples):
    "Return the recorded loss after each of these numbers of samples, interpolated between records"
    return np.interp(samples, learn.samples_seen.at, [o.item() for o in learn.recorder.losses])

def show_table(runs):
    "Print a table that compares the runs with the first one"
    print(f'\n{"":42} {"steps":>6} {"valid loss":>11} {"accuracy":>9} '
          f'{"largest weight":>15} {"recorded":>9} {"largest loss":>13}')
    print(f'{"":42} {"":6} {"":11} {"":9} {"difference":>15} {"losses":>9} {"difference":>13}')
    first = runs[0][1]
    for name,learn in runs:
        _,valid_loss,acc = learn.recorder.values[-1]
        weight_diff = (weights(learn)-weights(first)).abs().max()
        print(f'{name:42} {learn.samples_seen.n_steps:6} {valid_loss:11.6f} {acc:9.4f} {weight_diff:15.1e} '
              f'{len(learn.recorder.losses):9} {gaps(learn, first).max():13.1e}')

def gaps(learn, first):
    "Return the absolute differences of the recorded losses of both, after each step of `first`"
    at = first.samples_seen.at
    return np.abs(losses_at(learn, at)-losses_at(first, at))

def plot(runs, fname):
    """Plot validation loss and largest weight difference, as in the table, but after each epoch

    Return the picture's path.
    """
    fig,(ax,ax2) = plt.subplots(1, 2, figsize=(12,4.5), gridspec_kw=dict(width_ratios=[3,2]))
    first = runs[0][1]
    styles = dict(color='lightgrey', lw=8),dict(color='tab:blue', lw=1.8),dict(color='tab:orange', lw=1.2)
    for (name,learn),style in zip(runs, styles):
        epochs = range(1, n_epoch+1)
        ax.plot(epochs, [loss for _,loss,_ in learn.recorder.values], label=name, **style)
        if learn is first: continue
        differences = [(a-b).abs().max() for a,b in zip(learn.samples_seen.weights, first.samples_seen.weights)]
        ax2.semilogy(epochs, differences, label=name, color=style['color'])
    ax.set(xlabel='epoch', ylabel='validation loss', title='Validation loss')
    ax2.set(xlabel='epoch', ylabel='difference', ylim=(1e-9,1), title=f'Largest weight difference to {runs[0][0]}')
    for o in (ax,ax2):
        o.legend(frameon=False)
        o.spines[['top','right']].set_visible(False)
    fig.tight_layout()
    fig.savefig(fname, dpi=110)
    return Path(fname).resolve()

def main():
    start = time.time()
    runs = [train(f'batches of {big}', big, []),
            train(f'micro-batches of {micro}, fastaccum', micro, GradientAccumulation(big)),
            train(f"micro-batches of {micro}, fastai's callback", micro, FastaiGradientAccumulation(big))]
    show_table(runs)
    print("\nfastai's callback records and smooths a loss per micro-batch, "
          "so its recorded losses differ also for this reason.")
    print(f'\nThe picture is {plot(runs, "demo.png")} ({time.time()-start:.0f} s)')

if __name__=='__main__': main()
