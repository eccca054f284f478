"Four hundred random twins. `make sweep N=10000` runs any number."
import pytest, sweep

@pytest.mark.parametrize('block', range(8))
def test_random_twins(block):
    res = sweep.worst(map(sweep.check, range(block*50, block*50+50)))   # `check` asserts the bounds
    print(f'50 twins, largest deviations: {res}')
