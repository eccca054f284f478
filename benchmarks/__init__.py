"""Benchmarks, such as `python -m benchmarks.ways`. They write into `results`, which pages read."""
import os
os.environ.setdefault('OMP_NUM_THREADS', '1')   # times are those of one thread; set before importing torch
import json, platform, statistics
from datetime import date
from importlib.metadata import version
from pathlib import Path

results = Path(__file__).parent/'results'

def made(*notes):
    "Return a line with the date, these notes, the hardware and the versions of a measurement"
    import fastaccum, torch
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else f'{platform.machine()} CPU'
    versions = f"fastaccum {fastaccum.__version__}, fastai {version('fastai')}, torch {torch.__version__}"
    return ', '.join([f'{date.today()}', *notes, hardware, versions, f'python {platform.python_version()}'])

def save(name, res):
    "Write `res` to `results/{name}.json`"
    file = results/f'{name}.json'
    file.write_text(json.dumps(res, indent=1, ensure_ascii=False)+'\n', encoding='utf-8')

def table(head, rows):
    "Return a Markdown table"
    return '\n'.join('| '+' | '.join(map(str, o))+' |' for o in [head, ['---']*len(head), *rows])

def by_turns(arms, rounds):
    """Call the functions in the dict `arms` by turns, because machines are noisy; return a list of results for each

    The first round warms up, and its results are not used. Every other round calls the functions in reverse order.
    """
    found = {nm:[] for nm in arms}
    for i in range(rounds+1):
        for nm in list(arms) if i%2 else reversed(arms):
            res = arms[nm]()
            if i: found[nm].append(res)
    return found

def median_ratio(values, reference): return statistics.median(a/b for a,b in zip(values, reference))

def quiet(learn):
    "Switch off the progress bar and printed rows of the Learner, and return it"
    from fastai.callback.progress import ProgressCallback
    from fastcore.basics import noop
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

class Batches(list):
    "A list of batches that replaces a loader, so that loading takes no time"
    def __init__(self, batches, bs, device='cpu'):
        super().__init__(batches)
        self.bs,self.device = bs,device
