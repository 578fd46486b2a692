/* Learning from the tokens of the text: as hf_specdec/methods/auto/python_search.py does. */

#include "search.h"
#include <math.h>

#define RATE 0.02
#define SEEN_AT_RATE 200.0
#define LONGEST_STEP 2.0
#define CLEAR 0.002
#define PRIOR 6.0
#define MAX_EXPECTED 100.0
#define FADE 0.97

/* Move the weights of the prediction's kind towards `right`, the token that came; -1 where memory runs out. */
static int mixer_learn(const Search *search, Arrays *arrays, const Prediction *prediction, int32_t right) {
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
        if (pass == 1) break;
        for (int place = 0; place < count; place++) sums[place] += candidates[place].noise;
        softmax(sums, count, prediction->others);
        for (int place = 0; place < count; place++) {
            double error = (double)(candidates[place].token == right) - sums[place];
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

/* Count a drafted candidate and what became of it. */
static void calibration_record(Arrays *arrays, double probability, int accepted) {
    int bin = bin_of(probability);
    arrays->expected[bin] += probability;
    arrays->accepted[bin] += accepted;
    if (arrays->expected[bin] > MAX_EXPECTED) {
        arrays->expected[bin] /= 2;
        arrays->accepted[bin] /= 2;
    }
    arrays->factors[bin] = (arrays->accepted[bin] + PRIOR) / (arrays->expected[bin] + PRIOR);
}

/* Correct by the drafted candidates: tokens of the sequence that are none are left out. */
static void learn_drafted(const Search *search, Arrays *arrays, const Prediction *prediction, const int32_t *tokens,
                          Py_ssize_t count, int right) {
    double expected = 0.0;
    int known = 0, accepted = 0;
    for (Py_ssize_t place = 0; place < count; place++) {
        const Candidate *one = candidate_of(search, prediction, tokens[place]);
        if (one == NULL) continue;
        known++;
        expected += corrected(arrays, one->raw);
        accepted |= tokens[place] == right;
    }
    if (known) {
        arrays->record[0] = FADE * arrays->record[0] + expected;
        arrays->record[1] = FADE * arrays->record[1] + accepted;
    }
    for (Py_ssize_t place = 0; place < count; place++) {
        const Candidate *one = candidate_of(search, prediction, tokens[place]);
        if (one != NULL) calibration_record(arrays, one->raw, tokens[place] == right);
    }
}

static int learn_token(Search *search, Arrays *arrays, int node, int token, const int32_t *drafted, Py_ssize_t count) {
    const Prediction *prediction = predicted(search, arrays, node);
    if (prediction == NULL || mixer_learn(search, arrays, prediction, token) < 0) return -1;
    learn_drafted(search, arrays, prediction, drafted, count, token);
    return 0;
}

int search_learn(Search *search, Arrays *arrays, int32_t *const lists[3], const Py_ssize_t counts[3], int32_t *work) {
    const int32_t *tokens = lists[0], *parents = lists[1], *accepted = lists[2];
    int node = 0, place = 0;
    for (Py_ssize_t number = 0; number < counts[2] && node >= 0; number++) {
        int32_t token = accepted[number];
        int count = 0, following = -1;
        for (Py_ssize_t below = place < 0 ? counts[0] : place + 1; below < counts[0]; below++) {
            if (parents[below] != place) continue;
            work[count++] = tokens[below];
            if (tokens[below] == token) following = (int)below;
        }
        if (learn_token(search, arrays, node, token, work, count) < 0) return -1;
        node = search_child_of(search, node, token);
        place = following;
    }
    return 0;
}
