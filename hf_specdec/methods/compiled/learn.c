/* Learning from the tokens of the text: as hf_specdec/methods/auto/mixer.py and calibration.py do. */

#include "search.h"
#include <math.h>

#define RATE 0.02
#define SEEN_AT_RATE 200.0
#define LONGEST_STEP 2.0
#define LARGEST 700.0
#define CLEAR 0.002
#define PRIOR 6.0
#define MAX_EXPECTED 100.0

int mixer_learn(const Search *search, Arrays *arrays, const Prediction *prediction, int32_t right) {
    int count = prediction->candidates.count, clear = 0;
    const Candidate *candidates = search->candidates.at + prediction->candidates.first;
    double *weights = arrays->weights + prediction->kind * WIDTH, steps[WIDTH] = {0.0};
    double *errors = PyMem_Calloc((size_t)(count ? 2 * count : 1), sizeof(double)), *sums = errors + count;
    if (errors == NULL) return -1;
    for (int place = 0; place < count; place++) sums[place] = weights[0];
    for (int pass = 0; pass < 2; pass++) { /* sums of the evidence, then each source's part in the errors */
        for (int number = 0; number < prediction->sources.count; number++) {
            Source source = search->sources.at[prediction->sources.first + number];
            for (int one = source.first; one < source.first + source.count; one++) {
                Evidence said = search->evidence.at[one];
                int place = 0;
                while (candidates[place].token != said.token) place++;
                if (pass == 0) sums[place] += weights[source.place + 1] * said.value;
                else if (errors[place] != 0.0) steps[source.place + 1] += errors[place] * said.value;
            }
        }
        for (int place = 0; pass == 0 && place < count; place++) {
            double odds = -sums[place] < LARGEST ? -sums[place] : LARGEST;
            double error = (double)(candidates[place].token == right) - 1.0 / (1.0 + exp(odds));
            if (fabs(error) < CLEAR) continue;
            errors[place] = error;
            steps[0] += error;
            clear++;
        }
    }
    double rate = RATE / sqrt(1.0 + (double)arrays->seen[prediction->kind] / SEEN_AT_RATE);
    arrays->seen[prediction->kind]++;
    for (int place = 0; clear && place < WIDTH; place++) {
        double step = steps[place] < LONGEST_STEP ? steps[place] : LONGEST_STEP;
        weights[place] += rate * (step > -LONGEST_STEP ? step : -LONGEST_STEP);
    }
    PyMem_Free(errors);
    return 0;
}

void calibration_record(Arrays *arrays, double probability, int accepted) {
    int bin = (int)(probability * NUM_BINS);
    if (bin > NUM_BINS - 1) bin = NUM_BINS - 1;
    arrays->expected[bin] += probability;
    arrays->accepted[bin] += accepted;
    if (arrays->expected[bin] > MAX_EXPECTED) {
        arrays->expected[bin] /= 2;
        arrays->accepted[bin] /= 2;
    }
    arrays->factors[bin] = (arrays->accepted[bin] + PRIOR) / (arrays->expected[bin] + PRIOR);
}
