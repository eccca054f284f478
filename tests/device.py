"""Provides the device of laws/test_device.py: a GPU, or if there is none, the device of device.cpp.

`FASTACCUM_DEVICE=cuda` chooses the GPU, and `FASTACCUM_DEVICE=sim` the simulated device. The tests run
in a separate process for two reasons. PyTorch must know a device before the first backward pass of a
process. And other tests fork their process, which must not have run a backward pass on a device.
"""
import ctypes, hashlib, os, shutil, subprocess, sys, time, traceback, types, warnings
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from threading import Thread
from xml.etree import ElementTree
import pytest, torch

kind = os.environ.get('FASTACCUM_DEVICE') or ('cuda' if torch.cuda.device_count() else 'sim')
# the name of an environment variable that is set in the separate process, which runs the tests
process_variable = 'FASTACCUM_DEVICE_PROCESS'
has_device = process_variable in os.environ
tests = Path(__file__).parent
laws = tests/'laws'/'test_device.py'

def device(i=0): return torch.device(kind, i)
def n_devices(): return torch.get_device_module(kind).device_count()

# Build the simulated device, and make it known to PyTorch

def library():
    """Return the path of the library with the simulated device, which is built once for each environment

    If this Python has no virtual environment, or one that is read-only, the library lies in the home
    folder of these tests, and is built anew in each session. Its name has a hash of device.cpp and
    PyTorch's version.
    """
    version = hashlib.sha256((tests/'device.cpp').read_bytes()).hexdigest()[:12]
    name = f'device-{torch.__version__}-{version}.so'
    in_environment = Path(sys.prefix)/'cache'/'fastaccum'/name
    is_virtual = sys.prefix!=sys.base_prefix
    if is_virtual and (in_environment.exists() or os.access(sys.prefix, os.W_OK)): return in_environment
    return Path.home()/'.cache'/'fastaccum'/name

def build():
    "Build the simulated device if needed. Return the reason why it cannot be built, or an empty string"
    if kind!='sim' or library().exists(): return ''
    compiler = os.environ.get('CXX') or shutil.which('g++') or shutil.which('clang++')
    if not compiler: return "the simulated device needs a C++ compiler: install g++, as with `apt install g++`"
    torchs = Path(torch.__file__).parent
    # several processes may build at the same time, so each builds a file of its own and renames the
    # complete file
    partial = library().with_suffix(f'.{os.getpid()}')
    partial.parent.mkdir(parents=True, exist_ok=True)
    cmd = [compiler, '-std=c++20', '-O1', '-w', '-shared', '-fPIC', tests/'device.cpp', '-o', partial]
    cmd += [f'-I{torchs}/include', f'-I{torchs}/include/torch/csrc/api/include']
    cmd += [f'-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}']
    cmd += [f'-L{torchs}/lib', '-lc10', '-ltorch_cpu', '-ltorch']
    # LC_ALL=C: the compiler writes its errors in English
    res = subprocess.run(cmd, env=os.environ|dict(LC_ALL='C'), capture_output=True, text=True)
    if not res.returncode:
        partial.replace(library())
        return ''
    error = next((o for o in res.stderr.splitlines() if 'error' in o), res.stderr)
    return f"device.cpp does not build with torch {torch.__version__}: install torch 2.15, g++ 11 or newer ({error})"

def index(d):
    "Return the index of the device `d`: an int, a device or its name, or None for the current one"
    if d is None: return torch.ops.sim.current_device()
    return d if isinstance(d, int) else torch.device(d).index or 0

class Current:
    "A context in which the simulated device `d` is the current one"
    def __init__(self, d): self.i = index(d)
    def __enter__(self):
        self.old = torch.ops.sim.current_device()
        torch.ops.sim.set_device(self.i)
    def __exit__(self, *_): torch.ops.sim.set_device(self.old)

@lru_cache
def load():
    "Register the simulated device in this process as `torch.sim`, with functions as in `torch.cuda`"
    if kind!='sim': return
    torch.ops.load_library(library())
    torch.utils.rename_privateuse1_backend('sim')
    ops,mod = torch.ops.sim,types.ModuleType('torch.sim')
    mod.device,mod.device_count,mod.current_device = Current,lambda: 2,ops.current_device
    mod.set_device = lambda d: ops.set_device(index(d))
    mod.is_available = mod.is_initialized = lambda: True
    mod._is_in_bad_fork = lambda: False
    mod.synchronize = lambda device=None: None
    mod.manual_seed = mod.manual_seed_all = ops.manual_seed
    mod.get_rng_state = lambda device=None: ops.get_rng_state(index(device))
    mod.set_rng_state = lambda state, device=None: ops.set_rng_state(index(device), state)
    mod.memory_allocated = lambda device=None: ops.memory_allocated()
    mod.max_memory_allocated = lambda device=None: ops.max_memory_allocated()
    mod.reset_peak_memory_stats = lambda device=None: ops.reset_peak_memory_stats()
    mod.get_amp_supported_dtype = lambda: [torch.float16,torch.bfloat16]
    torch._register_device_module('sim', mod)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

# Measuring and limiting the device

def memory_in_use(): return torch.get_device_module(kind).memory_allocated()

@contextmanager
def memory_for(nbytes):
    "In this context, let the device have memory for `nbytes` more than was in use before"
    limit = memory_in_use()+nbytes
    if kind=='sim': torch.ops.sim.set_memory_limit(limit)
    else:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device()).total_memory
        torch.cuda.set_per_process_memory_fraction(limit/total)
    try: yield
    finally:
        if kind=='sim': torch.ops.sim.set_memory_limit(None)
        else: torch.cuda.set_per_process_memory_fraction(1.)

@contextmanager
def without_float64():
    "In this context, let the simulated device refuse double precision, as Apple's GPUs do"
    torch.ops.sim.set_float64(False)
    try: yield
    finally: torch.ops.sim.set_float64(True)

@contextmanager
def synchronizations():
    """Collect the calls that synchronize the device, in a list

    Its entries are lists of file names: the files in the stack of the call, innermost first.
    """
    calls = []
    def note(_):
        # `walk_stack(None)` would leave out the innermost frames, in Python 3.12 and later one more
        files = [o.f_code.co_filename for o,_ in traceback.walk_stack(sys._getframe())]
        calls.append([o for o in files if o not in (__file__,warnings.__file__)])
    if kind=='sim':
        listener = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(note)
        listen = ctypes.CDLL(library()).listen
        listen(listener)
        try: yield calls
        finally: listen(None)
        return
    with warnings.catch_warnings():   # PyTorch warns of each call that synchronizes CUDA
        warnings.simplefilter('always')
        warnings.showwarning = lambda message, *_: note(message) if 'synchroniz' in str(message) else None
        torch.cuda.set_sync_debug_mode('warn')
        try: yield calls
        finally: torch.cuda.set_sync_debug_mode('default')

# Run the tests in a separate process, and report their results in this process

class DeviceTests:
    """Runs tests of laws/test_device.py in a separate process, while other tests run

    All processes of pytest-xdist read its results from the folder `device` in the home folder of these tests.
    """
    # in the process of pytest-xdist that has started the separate process: its `Popen`, and the thread that
    # waits for its end
    process = thread = None
    def __init__(self): self.folder = Path.home()/'device'

    def start(self, names, root):
        "Start the tests of these names, unless another process of pytest-xdist has started them"
        try: self.folder.mkdir()
        except FileExistsError: return
        cmd = [sys.executable, '-m', 'pytest', '-q', '-n0', '-p', 'no:cacheprovider']
        cmd += [f'--junitxml={self.folder/"report.xml"}', *(f'{laws}::{o}' for o in names)]
        env = os.environ|{process_variable:'1', 'FASTACCUM_DEVICE':kind}
        with open(self.folder/'output.txt', 'wb') as file:
            self.process = subprocess.Popen(cmd, cwd=root, env=env, stdout=file, stderr=subprocess.STDOUT)
        self.thread = Thread(target=self._note_end, daemon=True)
        self.thread.start()

    def _note_end(self):
        code = self.process.wait()
        partial = self.folder/'partial.txt'
        partial.write_text(str(code))
        partial.rename(self.folder/'code.txt')   # exists only with its text

    def end(self, was_stopped):
        """Wait for the separate process, because other processes of pytest-xdist may need its results

        If the session `was_stopped`, end the separate process.
        """
        if self.process is None: return
        if was_stopped: self.process.kill()
        self.thread.join()

    def outcomes(self):
        "Return a dict from the name of a test to the element of pytest's report, as soon as there is one"
        while not (self.folder/'code.txt').exists(): time.sleep(.1)
        report = self.folder/'report.xml'
        if report.exists(): return {o.get('name'):o for o in ElementTree.parse(report).iter('testcase')}
        code,output = ((self.folder/o).read_text(encoding='utf-8') for o in ('code.txt','output.txt'))
        pytest.fail(f'the process with the device ended with {code}:\n{output[-4000:]}', False)

device_tests = DeviceTests()

def pytest_collection_finish(session):
    "A hook of pytest: start the tests of laws/test_device.py"
    names = [o.name for o in session.items if o.path==laws]
    if names and not has_device: device_tests.start(names, session.config.rootpath)

def pytest_sessionfinish(session, exitstatus):
    was_stopped = session.shouldstop or session.shouldfail or exitstatus==pytest.ExitCode.INTERRUPTED
    device_tests.end(bool(was_stopped))

def pytest_pyfunc_call(pyfuncitem):
    "A hook of pytest: for a test of laws/test_device.py, report its result from the separate process"
    if has_device or pyfuncitem.path!=laws: return None
    for o in device_tests.outcomes()[pyfuncitem.name]:
        if o.tag=='skipped': pytest.skip(o.get('message'))
        if o.tag in ('failure','error'): pytest.fail(o.text, pytrace=False)
    return True
