"""Make an environment and install into it, unless that has been done.

`python tools/environment.py dev .venv python3.12` is how make runs it.
What was installed is noted in the environment, by the contents of the files that ask for it: touching them installs
nothing. An environment that was never finished, or that has another Python than the one asked for, is made anew.
Needs nothing but Python.
"""
import hashlib, json, re, subprocess, sys
from configparser import ConfigParser
from pathlib import Path

root = Path(__file__).resolve().parent.parent
metadata = ['settings.ini', 'pyproject.toml', 'setup.py']
peers = ['benchmarks/peers/requirements.txt', 'benchmarks/peers/no-deps.txt']

def setting(name):
    settings = ConfigParser(delimiters='=', interpolation=None)
    settings.read_string((root/'settings.ini').read_text(encoding='utf-8'))
    return settings['DEFAULT'][name]

def oldest(venv):
    "The lower bounds in settings.ini as constraints for pip, in a file: torch>=2.6 becomes torch==2.6.*"
    fn = venv/'oldest.txt'
    fn.write_text(re.sub(r'>=(\S+)\s*', r'==\1.*\n', setting('requirements')+'\n'), encoding='utf-8')
    return fn

# For each kind: what its installation is about, the files that ask for it, and what pip is told, call by call
kinds = dict(
    dev=('torch, fastai and what the tests need', '6 GB', metadata, lambda venv: [['-e', '.[dev]']]),
    docs=('what the site needs', '0.2 GB', metadata, lambda venv: [['-q', '-e', '.[docs]']]),
    jupyter=('Jupyter', '0.2 GB', metadata, lambda venv: [['-q', '-e', '.[jupyter]']]),
    lint=('what reads the code and the workflows', '0.1 GB', metadata,   # without the package, and so without torch
        lambda venv: [['-q', *setting('lint_requirements').split()]]),
    compat=('the oldest versions supported', '6 GB', metadata,   # that fastai fills no gaps in tables of pandas 3
        lambda venv: [['-c', oldest(venv), '-e', '.', 'pandas<3', 'pytest', 'hypothesis', 'wandb', 'tensorboard',
            'accelerate']]),
    # fastxtend and Composer ask for packages older than they need: they are installed without what they ask for
    peers=('Lightning, accelerate, transformers, Composer and fastxtend', '7 GB', metadata+peers,
        lambda venv: [['-r', peers[0], '-e', '.'], ['--no-deps', '-r', peers[1]]]))

def call(*args): subprocess.run([str(o) for o in args], cwd=root, check=True)

def ask(python):
    """Which Python this is, and where, in or out of an environment: what tells it from others, and its command.
    Nothing if it does not run"""
    code = ('import sys; print(sys.version, sys.base_prefix, sep=" in "); '
        'print(getattr(sys, "_base_executable", sys.executable))')
    try: res = subprocess.run([str(python), '-c', code], capture_output=True, text=True)
    except OSError: return None,None
    return (None,None) if res.returncode else res.stdout.strip().rsplit('\n', 1)

def fingerprint(files): return hashlib.sha256(b''.join(o.encode()+(root/o).read_bytes() for o in files)).hexdigest()

def installed(stamp):
    "What was installed: a fingerprint for each kind; None if make did not make this environment"
    if not stamp.exists(): return None
    try: return dict(json.loads(stamp.read_text()))
    except ValueError: return None   # empty: by a Makefile of before

def main(kind, venv, python):
    what,size,files,told = kinds[kind]
    venv = root/venv
    stamp,bin = venv/'.installed',venv/'bin/python'
    (asked,base),have,done = ask(python),ask(bin)[0],installed(stamp)
    if not asked: return f'{python} does not run'
    wrong = f'has another Python than {python}' if have and have!=asked else '' if have else 'has no Python that runs'
    if done=={}: wrong = 'was not finished'
    if venv.exists() and any(venv.iterdir()) and wrong:
        if done is None:
            return (f'{venv} {wrong}, and was not made by make: remove it, or choose another place, '
                f'as in: make VENV={venv}-2')
        print(f'{venv} {wrong}: it is made anew', flush=True)
    if not wrong and (done or {}).get(kind)==fingerprint(files): return
    print(f'Installing {what} into {venv}: the first time takes minutes and some {size}', flush=True)
    try:
        if wrong:
            done = {}
            venv.mkdir(parents=True, exist_ok=True)
            try: call(base, '-m', 'venv', '--clear', venv)
            finally: stamp.write_text('{}')   # begun, and not finished
        for args in told(venv): call(bin, '-m', 'pip', '--disable-pip-version-check', 'install', *args)
    except subprocess.CalledProcessError as e: return f'This failed, as said above: {" ".join(e.cmd)}'
    stamp.write_text(json.dumps((done or {}) | {kind: fingerprint(files)}))

if __name__=='__main__': sys.exit(main(*sys.argv[1:]))
