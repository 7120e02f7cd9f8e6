/* SPDX-License-Identifier: Apache-2.0
 *
 * breccia.h from C11: each verb against arithmetic done here, on values that the formats hold exactly, and what is
 * refused. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "breccia/breccia.h"

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, breccia_last_message());     \
            exit(EXIT_FAILURE);                                                                              \
        }                                                                                                    \
    } while (0)

/* What a program of interface 1 was compiled with stays where it is. */
#define STAYS(type, member, at) _Static_assert(offsetof(type, member) == (at), #type "." #member)
#if UINTPTR_MAX == UINT64_MAX
STAYS(breccia_part_bytes, size, 0);
STAYS(breccia_part_bytes, global_scale, 32);
_Static_assert(sizeof(breccia_part_bytes) == 40, "breccia_part_bytes");
STAYS(breccia_matrix, recipe, 8);
STAYS(breccia_matrix, prepared, 16);
STAYS(breccia_matrix, batch, 24);
STAYS(breccia_matrix, columns, 40);
STAYS(breccia_matrix, dtype, 48);
STAYS(breccia_matrix, scale_form, 52);
STAYS(breccia_matrix, transposed, 56);
STAYS(breccia_matrix, data, 64);
STAYS(breccia_matrix, global_scale, 88);
_Static_assert(sizeof(breccia_matrix) == 96, "breccia_matrix");
STAYS(breccia_output, recipe, 8);
STAYS(breccia_output, batch, 16);
STAYS(breccia_output, columns, 32);
STAYS(breccia_output, dtype, 40);
STAYS(breccia_output, data, 48);
STAYS(breccia_output, global_scale, 72);
_Static_assert(sizeof(breccia_output) == 80, "breccia_output");
STAYS(breccia_cast_options, importance, 8);
STAYS(breccia_cast_options, amax, 16);
STAYS(breccia_cast_options, amax_count, 24);
STAYS(breccia_cast_options, stochastic, 32);
STAYS(breccia_cast_options, seed, 40);
STAYS(breccia_cast_options, row_length, 56);
_Static_assert(sizeof(breccia_cast_options) == 64, "breccia_cast_options");
STAYS(breccia_product_options, precision, 8);
_Static_assert(sizeof(breccia_product_options) == 16, "breccia_product_options");
#endif

enum { M = 3, N = 32, K = 64, E = 3 };

static breccia_recipe *recipe_of(const char *name, const char *fields) {
    breccia_recipe *recipe = NULL;
    CHECK(breccia_recipe_new(name, fields, &recipe) == BRECCIA_OK && recipe != NULL);
    return recipe;
}

static breccia_matrix numbers(const void *data, int64_t rows, int64_t columns) {
    breccia_matrix matrix = {.size = sizeof matrix, .rows = rows, .columns = columns, .data = data};
    return matrix;
}

static breccia_output results(void *data, int64_t rows, int64_t columns) {
    breccia_output matrix = {.size = sizeof matrix, .rows = rows, .columns = columns, .data = data};
    return matrix;
}

static void *part(int64_t bytes) { return bytes == 0 ? NULL : calloc(1, (size_t)bytes); }

static breccia_output batch_of(const breccia_recipe *recipe, int64_t batch, int64_t rows, int64_t columns) {
    breccia_output matrix = {.size = sizeof matrix, .recipe = recipe, .batch = batch, .rows = rows, .columns = columns};
    breccia_part_bytes sizes = {.size = sizeof sizes};
    CHECK(breccia_part_sizes(recipe, batch, rows, columns, &sizes) == BRECCIA_OK);
    matrix.data = part(sizes.data);
    matrix.scale = part(sizes.scale);
    matrix.zero_point = part(sizes.zero_point);
    matrix.global_scale = part(sizes.global_scale);
    return matrix;
}

static breccia_output quantized(const breccia_recipe *recipe, int64_t rows, int64_t columns) {
    return batch_of(recipe, 0, rows, columns);
}

/* What was written, to be read. */
static breccia_matrix written(const breccia_output *out) {
    breccia_matrix matrix = {.size = sizeof matrix,
                             .recipe = out->recipe,
                             .batch = out->batch,
                             .rows = out->rows,
                             .columns = out->columns,
                             .dtype = out->dtype,
                             .data = out->data,
                             .scale = out->scale,
                             .zero_point = out->zero_point,
                             .global_scale = out->global_scale};
    return matrix;
}

static void free_parts(breccia_output *matrix) {
    free(matrix->data);
    free(matrix->scale);
    free(matrix->zero_point);
    free(matrix->global_scale);
}

/* Multiples of a half from -1.5 to 1.5, of which each format holds every one. */
static void fill(float *x, int64_t count, int step) {
    for (int64_t i = 0; i < count; ++i) x[i] = 0.5F * (float)(i * step % 7 - 3);
}

/* Columns that count differently, and some that say nothing. */
static void by_importance(breccia_matrix *in, breccia_output *codes, breccia_output *out) {
    static float h[K];
    breccia_matrix importance = numbers(h, 1, K), scaled = written(codes);
    breccia_cast_options options = {.size = sizeof options, .importance = &importance};
    for (int k = 0; k < K; ++k) h[k] = (float)(k % 5);
    CHECK(breccia_cast(in, codes, &options) == BRECCIA_OK);
    CHECK(breccia_dequantize(&scaled, out) == BRECCIA_OK);
    importance.rows = 2;
    CHECK(breccia_cast(in, codes, &options) == BRECCIA_VALUE_ERROR);
    CHECK(strstr(breccia_last_message(), "options.importance must have 1 row") != NULL);
    importance.rows = 1;
    h[3] = -1;
    CHECK(breccia_cast(in, codes, &options) == BRECCIA_VALUE_ERROR);
    importance.size = 0;
    CHECK(breccia_cast(in, codes, &options) == BRECCIA_VALUE_ERROR);
    CHECK(strstr(breccia_last_message(), "options.importance.size must be the sizeof") != NULL);
}

static void round_trip(const char *name, const char *fields, float tolerance) {
    static float w[N * K], back[N * K];
    breccia_recipe *recipe = recipe_of(name, fields);
    breccia_matrix in = numbers(w, N, K), scaled;
    breccia_output out = results(back, N, K), codes = quantized(recipe, N, K);
    fill(w, N * K, 3);
    CHECK(breccia_cast(&in, &codes, NULL) == BRECCIA_OK);
    scaled = written(&codes);
    CHECK(breccia_dequantize(&scaled, &out) == BRECCIA_OK);
    for (int i = 0; i < N * K; ++i) CHECK(back[i] - w[i] <= tolerance && w[i] - back[i] <= tolerance);
    by_importance(&in, &codes, &out);
    for (int i = 0; i < N * K; ++i) CHECK(back[i] - w[i] <= tolerance && w[i] - back[i] <= tolerance);
    free_parts(&codes);
    breccia_recipe_free(recipe);
}

/* Groups with exponents have these where others have zero points. */
static void exponents(void) {
    static float w[N * K], back[N * K];
    breccia_recipe *recipe = recipe_of("expanded", "group_size=32");
    breccia_matrix in = numbers(w, N, K), importance = numbers(w, 1, K), scaled;
    breccia_output out = results(back, N, K), codes = quantized(recipe, N, K);
    breccia_cast_options options = {.size = sizeof options, .importance = &importance};
    breccia_part_bytes sizes = {.size = sizeof sizes};
    fill(w, N * K, 3);
    CHECK(breccia_part_sizes(recipe, 0, N, K, &sizes) == BRECCIA_OK);
    CHECK(sizes.data == N * K && sizes.scale == N * K / 8 && sizes.zero_point == N * K / 16);
    CHECK(breccia_cast(&in, &codes, NULL) == BRECCIA_OK);
    scaled = written(&codes);
    CHECK(breccia_dequantize(&scaled, &out) == BRECCIA_OK);
    for (int i = 0; i < N * K; ++i) CHECK(back[i] - w[i] <= 0.02F && w[i] - back[i] <= 0.02F);
    CHECK(breccia_cast(&in, &codes, &options) == BRECCIA_VALUE_ERROR);
    CHECK(strstr(breccia_last_message(), "importance needs a recipe without exponents") != NULL);
    free_parts(&codes);
    breccia_recipe_free(recipe);
}

static void products(void) {
    static float x[M * K], w[N * K], y[M * N], z[M * N], bias[N];
    breccia_recipe *mxfp8 = recipe_of("mxfp8", NULL), *mxfp6 = recipe_of("mxfp6", "fp6_format=E2M3");
    breccia_matrix activations = numbers(x, M, K), weight = numbers(w, N, K), row = numbers(bias, 1, N);
    breccia_output result = results(y, M, N), other = results(z, M, N);
    breccia_output codes = quantized(mxfp8, N, K), more = quantized(mxfp6, N, K);
    breccia_matrix scaled = written(&codes), again = written(&more), turned, ready = {.size = sizeof ready};
    breccia_product_options fast = {.size = sizeof fast, .precision = BRECCIA_FAST};
    breccia_weight *prepared = NULL;
    fill(x, M * K, 5);
    fill(w, N * K, 3);
    fill(bias, N, 1);
    CHECK(breccia_cast(&weight, &codes, NULL) == BRECCIA_OK);
    CHECK(breccia_linear(&activations, &scaled, &row, &result, NULL) == BRECCIA_OK);
    for (int i = 0; i < M; ++i)
        for (int j = 0; j < N; ++j) {
            float sum = bias[j];
            for (int k = 0; k < K; ++k) sum += x[i * K + k] * w[j * K + k];
            CHECK(y[i * N + j] == sum); /* sums of quarters are exact */
        }
    CHECK(breccia_linear(&activations, &scaled, NULL, &result, NULL) == BRECCIA_OK);
    turned = scaled;
    turned.transposed = 1;
    CHECK(breccia_matmul(&activations, &turned, &other, NULL) == BRECCIA_OK);
    CHECK(memcmp(y, z, sizeof y) == 0);
    turned = weight;
    turned.transposed = 1;
    CHECK(breccia_matmul(&activations, &turned, &other, &fast) == BRECCIA_OK); /* bfloat16 holds them all */
    CHECK(memcmp(y, z, sizeof y) == 0);
    fast.precision = 2;
    CHECK(breccia_matmul(&activations, &turned, &other, &fast) == BRECCIA_VALUE_ERROR);

    /* A prepared weight is the weight, in either verb. */
    CHECK(breccia_prepare(&scaled, &prepared) == BRECCIA_OK && prepared != NULL);
    ready.prepared = prepared;
    memset(z, 0, sizeof z);
    CHECK(breccia_linear(&activations, &ready, NULL, &other, NULL) == BRECCIA_OK);
    CHECK(memcmp(y, z, sizeof y) == 0);
    ready.transposed = 1;
    CHECK(breccia_matmul(&activations, &ready, &other, NULL) == BRECCIA_OK);
    CHECK(memcmp(y, z, sizeof y) == 0);
    ready.transposed = 0;
    CHECK(breccia_cast(&ready, &more, NULL) == BRECCIA_TYPE_ERROR); /* it is no matrix of numbers */
    breccia_weight_free(prepared);
    breccia_weight_free(NULL);
    CHECK(breccia_prepare(&weight, &prepared) == BRECCIA_VALUE_ERROR && prepared == NULL);

    /* The values survive a change of recipe, and so does the product. */
    CHECK(breccia_requantize(&scaled, &more) == BRECCIA_OK);
    CHECK(breccia_linear(&activations, &again, NULL, &other, NULL) == BRECCIA_OK);
    CHECK(memcmp(y, z, sizeof y) == 0);
    free_parts(&codes);
    free_parts(&more);
    breccia_recipe_free(mxfp8);
    breccia_recipe_free(mxfp6);
}

/* Matrices of a batch are what each of them is alone; a weight of several matrices is that of experts. */
static void batches(void) {
    static float w[E * N * K], back[E * N * K], x[E * M * K], y[E * M * N], z[M * N];
    const int64_t offsets[E + 1] = {0, 2, 2, 7}, falling[E + 1] = {0, 5, 2, 7};
    breccia_recipe *nvfp4 = recipe_of("nvfp4", NULL), *mxfp4 = recipe_of("mxfp4", NULL);
    breccia_output stack = batch_of(nvfp4, E, N, K), out = results(back, N, K), one = quantized(nvfp4, N, K);
    breccia_output sums = results(y, M, N), single = results(z, M, N), experts = batch_of(mxfp4, E, N, K);
    float global_scales[E];
    breccia_matrix in = numbers(w, N, K), scaled = written(&stack), activations = numbers(x, M, K);
    fill(w, E * N * K, 3);
    fill(x, E * M * K, 5);
    for (int i = 0; i < N * K; ++i) w[i] *= 4;
    in.batch = out.batch = sums.batch = activations.batch = E;
    CHECK(breccia_cast(&in, &stack, NULL) == BRECCIA_OK); /* one global scale, that of the largest of all */
    CHECK(breccia_dequantize(&scaled, &out) == BRECCIA_OK);
    for (int i = 0; i < E * N * K; ++i) CHECK(back[i] - w[i] <= 1e-5F && w[i] - back[i] <= 1e-5F);

    /* Each with a global scale of its own, and alone. */
    for (int e = 0; e < E; ++e) {
        const breccia_matrix member = numbers(w + e * N * K, N, K);
        CHECK(breccia_cast(&member, &one, NULL) == BRECCIA_OK);
        memcpy((char *)stack.data + e * N * K / 2, one.data, N * K / 2);
        memcpy((char *)stack.scale + e * N * K / 16, one.scale, N * K / 16);
        memcpy(global_scales + e, one.global_scale, sizeof(float));
    }
    CHECK(global_scales[0] != global_scales[1]);
    scaled.global_scale = global_scales;
    scaled.global_scales = 1;
    scaled.transposed = 1;
    CHECK(breccia_matmul(&activations, &scaled, &sums, NULL) == BRECCIA_OK);
    for (int e = 0; e < E; ++e) {
        const breccia_matrix member = numbers(w + e * N * K, N, K), rows = numbers(x + e * M * K, M, K);
        const breccia_matrix alone = written(&one);
        CHECK(breccia_cast(&member, &one, NULL) == BRECCIA_OK);
        CHECK(breccia_linear(&rows, &alone, NULL, &single, NULL) == BRECCIA_OK);
        CHECK(memcmp(z, y + e * M * N, sizeof z) == 0);
    }

    /* Rows 0 and 1 by the first weight, 2 to 6 by the third, and two that belong to none. */
    CHECK(breccia_cast(&in, &experts, NULL) == BRECCIA_OK);
    scaled = written(&experts);
    activations = numbers(x, E * M, K);
    sums = results(y, E * M, N);
    CHECK(breccia_grouped_matmul(&activations, &scaled, offsets, &sums, NULL) == BRECCIA_OK);
    for (int i = 0; i < E * M; ++i)
        for (int j = 0; j < N; ++j) {
            const float *weight = w + (i < 2 ? 0 : 2 * N * K) + j * K;
            float sum = 0;
            for (int k = 0; k < K && i < 7; ++k) sum += x[i * K + k] * weight[k];
            CHECK(y[i * N + j] == sum);
        }
    CHECK(breccia_grouped_matmul(&activations, &scaled, falling, &sums, NULL) == BRECCIA_VALUE_ERROR);
    CHECK(breccia_grouped_matmul(&activations, &scaled, NULL, &sums, NULL) == BRECCIA_VALUE_ERROR);
    scaled = written(&one);
    CHECK(breccia_grouped_matmul(&activations, &scaled, offsets, &sums, NULL) == BRECCIA_VALUE_ERROR);
    CHECK(strstr(breccia_last_message(), "w must be a batch") != NULL);
    in.batch = -1;
    CHECK(breccia_cast(&in, &stack, NULL) == BRECCIA_VALUE_ERROR);
    CHECK(strstr(breccia_last_message(), "x.batch must be at least 0, got -1") != NULL);
    free_parts(&stack);
    free_parts(&one);
    free_parts(&experts);
    breccia_recipe_free(nvfp4);
    breccia_recipe_free(mxfp4);
}

/* Powers of two in float are the scales of codes that they are; other numbers are refused. */
static void float_scales(void) {
    static float w[N * K], back[N * K], again[N * K], scales[N * K / 32];
    breccia_recipe *mxfp8 = recipe_of("mxfp8", NULL);
    breccia_output codes = quantized(mxfp8, N, K), out = results(back, N, K), other = results(again, N, K);
    breccia_matrix in = numbers(w, N, K), scaled = written(&codes);
    fill(w, N * K, 3);
    for (int i = 0; i < N * K; ++i) w[i] *= i / 32 % 3 == 0 ? 64.0F : 0.125F;
    CHECK(breccia_cast(&in, &codes, NULL) == BRECCIA_OK);
    CHECK(breccia_dequantize(&scaled, &out) == BRECCIA_OK);
    for (int i = 0; i < N * K / 32; ++i) {
        const uint32_t bits = (uint32_t)((const unsigned char *)codes.scale)[i] << 23;
        memcpy(&scales[i], &bits, sizeof bits);
    }
    scaled.scale = scales;
    scaled.scale_form = BRECCIA_SCALES_FLOAT32;
    CHECK(breccia_dequantize(&scaled, &other) == BRECCIA_OK);
    CHECK(memcmp(back, again, sizeof back) == 0);
    scales[5] = 3;
    CHECK(breccia_dequantize(&scaled, &other) == BRECCIA_VALUE_ERROR);
    CHECK(strstr(breccia_last_message(), "scaled.scale must be values of float8_e8m0fnu, got 3.000000 for scale 5"));
    scaled.scale_form = 2;
    CHECK(breccia_dequantize(&scaled, &other) == BRECCIA_VALUE_ERROR);
    free_parts(&codes);
    breccia_recipe_free(mxfp8);
}

/* A part of a tensor is cast as that tensor is, and draws are those of the seed. */
static void options_of_casts(void) {
    static float w[N * K], largest[1];
    breccia_recipe *current = recipe_of("current", NULL), *nvfp4 = recipe_of("nvfp4", NULL);
    breccia_output whole = quantized(current, N, K), half = quantized(current, N / 2, K);
    breccia_output drawn = quantized(nvfp4, N, K), other = quantized(nvfp4, N, K);
    breccia_matrix in = numbers(w, N, K), part_of_it = numbers(w + N / 2 * K, N / 2, K);
    breccia_cast_options options = {.size = sizeof options, .amax = largest, .amax_count = 1};
    for (int i = 0; i < N * K; ++i) w[i] = (float)(i % 61 - 30) * 0.37F * (i < K ? 5.0F : 1.0F);
    for (int i = 0; i < N * K; ++i) {
        const float size = w[i] < 0 ? -w[i] : w[i];
        if (size > largest[0]) largest[0] = size;
    }
    CHECK(breccia_cast(&in, &whole, NULL) == BRECCIA_OK);
    CHECK(breccia_cast(&part_of_it, &half, NULL) == BRECCIA_OK);
    CHECK(memcmp(half.data, (char *)whole.data + N / 2 * K, N / 2 * K) != 0);
    CHECK(breccia_cast(&part_of_it, &half, &options) == BRECCIA_OK);
    CHECK(memcmp(half.data, (char *)whole.data + N / 2 * K, N / 2 * K) == 0);
    options.amax_count = -1;
    CHECK(breccia_cast(&part_of_it, &half, &options) == BRECCIA_VALUE_ERROR);
    CHECK(strstr(breccia_last_message(), "options.amax_count") != NULL);

    options = (breccia_cast_options){.size = sizeof options, .stochastic = 1, .seed = 7};
    CHECK(breccia_cast(&in, &drawn, &options) == BRECCIA_OK && breccia_cast(&in, &other, &options) == BRECCIA_OK);
    CHECK(memcmp(drawn.data, other.data, N * K / 2) == 0);
    options.seed = 8;
    CHECK(breccia_cast(&in, &other, &options) == BRECCIA_OK);
    CHECK(memcmp(drawn.data, other.data, N * K / 2) != 0);
    free_parts(&whole);
    free_parts(&half);
    free_parts(&drawn);
    free_parts(&other);
    breccia_recipe_free(current);
    breccia_recipe_free(nvfp4);
}

/* What a later header would add, and what no header has. */
static void sizes_of_structs(void) {
    struct {
        breccia_matrix known;
        int64_t added;
    } later = {.known = {.size = sizeof later, .rows = 2, .columns = 32}};
    static float w[2 * 32];
    breccia_recipe *mxfp8 = recipe_of("mxfp8", NULL);
    breccia_output codes = quantized(mxfp8, 2, 32), changed = codes;
    breccia_part_bytes sizes = {.size = 8};
    breccia_matrix in = numbers(w, 2, 32);
    later.known.data = w;
    CHECK(breccia_cast(&later.known, &codes, NULL) == BRECCIA_OK);
    later.added = 1;
    CHECK(breccia_cast(&later.known, &codes, NULL) == BRECCIA_VALUE_ERROR);
    CHECK(strstr(breccia_last_message(), "x must have zeros in the members that this library does not know") != NULL);
    in.size = sizeof in - 1;
    CHECK(breccia_cast(&in, &codes, NULL) == BRECCIA_VALUE_ERROR);
    CHECK(strstr(breccia_last_message(), "x.size must be the sizeof of its struct, at least ") != NULL);
    in = numbers(w, 2, 32);
    changed.reserved = 1;
    CHECK(breccia_cast(&in, &changed, NULL) == BRECCIA_VALUE_ERROR);
    CHECK(strstr(breccia_last_message(), "out.reserved must be 0, got 1") != NULL);
    changed.size = 0;
    CHECK(breccia_cast(&in, &changed, NULL) == BRECCIA_VALUE_ERROR);
    CHECK(breccia_part_sizes(mxfp8, 0, 2, 32, &sizes) == BRECCIA_VALUE_ERROR && sizes.size == 8);
    free_parts(&codes);
    breccia_recipe_free(mxfp8);
}

static void threads(void) {
    const int32_t before = breccia_threads();
    CHECK(before >= 1);
    CHECK(breccia_set_threads(2) == BRECCIA_OK && breccia_threads() == 2);
    CHECK(breccia_set_threads(0) == BRECCIA_VALUE_ERROR && breccia_threads() == 2);
    CHECK(breccia_set_threads(before) == BRECCIA_OK);
    CHECK(breccia_shutdown() == BRECCIA_OK && breccia_threads() == before);
}

static void refusals(void) {
    float x[64] = {0};
    breccia_recipe *recipe = NULL, *nvfp4 = recipe_of("nvfp4", "two_level=true");
    breccia_matrix in = numbers(x, 2, 32), changed;
    breccia_output out = quantized(nvfp4, 2, 32), to, plain = results(x, 2, 32);
    breccia_matrix codes = written(&out);
    breccia_part_bytes sizes = {.size = sizeof sizes};
    CHECK(breccia_recipe_new("nvfp5", NULL, &recipe) == BRECCIA_VALUE_ERROR && recipe == NULL);
    CHECK(strstr(breccia_last_message(), "did you mean 'nvfp4'") != NULL);
    CHECK(breccia_recipe_new("nvfp4", "two_level=maybe", &recipe) == BRECCIA_TYPE_ERROR);
    CHECK(strstr(breccia_last_message(), "true or false") != NULL);
    CHECK(breccia_recipe_new("nvfp4", "no_such=1", &recipe) == BRECCIA_TYPE_ERROR);
    CHECK(breccia_recipe_new("nvfp4", "two_level", &recipe) == BRECCIA_VALUE_ERROR);
    CHECK(breccia_recipe_new("nvfp4", "two_level=true,two_level=false", &recipe) == BRECCIA_VALUE_ERROR);
    CHECK(breccia_part_sizes(nvfp4, 0, -1, 32, &sizes) == BRECCIA_VALUE_ERROR);
    CHECK(breccia_part_sizes(nvfp4, -1, 1, 32, &sizes) == BRECCIA_VALUE_ERROR);

    CHECK(breccia_cast(&in, &plain, NULL) == BRECCIA_VALUE_ERROR); /* no recipe to cast to */
    CHECK(breccia_cast(&codes, &out, NULL) == BRECCIA_TYPE_ERROR);
    changed = codes;
    changed.rows = 1; /* what x is comes before its shape */
    CHECK(breccia_cast(&changed, &out, NULL) == BRECCIA_TYPE_ERROR);
    changed = in;
    changed.dtype = 9;
    CHECK(breccia_cast(&changed, &out, NULL) == BRECCIA_TYPE_ERROR);
    changed.rows = 1;
    CHECK(breccia_cast(&changed, &out, NULL) == BRECCIA_TYPE_ERROR);
    changed = in;
    changed.rows = 1;
    CHECK(breccia_cast(&changed, &out, NULL) == BRECCIA_VALUE_ERROR);
    changed = in;
    changed.data = NULL;
    CHECK(breccia_cast(&changed, &out, NULL) == BRECCIA_VALUE_ERROR);
    changed = in;
    changed.data = (char *)x + 1;
    CHECK(breccia_cast(&changed, &out, NULL) == BRECCIA_VALUE_ERROR);
    CHECK(strstr(breccia_last_message(), "x.data must lie at a multiple of 4 bytes, the size of a float32") != NULL);
    to = out;
    to.global_scale = (char *)out.global_scale + 2;
    CHECK(breccia_cast(&in, &to, NULL) == BRECCIA_VALUE_ERROR);
    CHECK(strstr(breccia_last_message(), "out.global_scale must lie at a multiple of 4 bytes") != NULL);
    changed = in;
    changed.transposed = 1;
    CHECK(breccia_cast(&changed, &out, NULL) == BRECCIA_VALUE_ERROR);
    to = out;
    to.global_scale = NULL;
    CHECK(breccia_cast(&in, &to, NULL) == BRECCIA_VALUE_ERROR);
    CHECK(strstr(breccia_last_message(), "out.global_scale must not be NULL") != NULL);
    changed = codes;
    changed.global_scale = NULL;
    CHECK(breccia_dequantize(&changed, &plain) == BRECCIA_VALUE_ERROR);
    CHECK(breccia_matmul(&in, &in, &plain, NULL) == BRECCIA_VALUE_ERROR);

    CHECK(breccia_cast(&in, &out, NULL) == BRECCIA_OK && strcmp(breccia_last_message(), "") == 0);
    free_parts(&out);
    breccia_recipe_free(nvfp4);
    breccia_recipe_free(NULL);
}

/* Every function with each of its pointers null, the others in order: a status and the name of the pointer, whichever
 * of its arguments a compiler evaluates first. */
static void null_pointers(void) {
    static float x[2 * 32], w[2 * 32], y[2 * 2], row[2];
    static const int64_t offsets[3] = {0, 1, 2};
    breccia_recipe *mxfp8 = recipe_of("mxfp8", NULL), *recipe = NULL;
    breccia_weight *prepared = NULL;
    breccia_matrix a = numbers(x, 2, 32), weight = numbers(w, 2, 32), turned = weight, bias = numbers(row, 1, 2), bare;
    breccia_output out = results(y, 2, 2), back = results(w, 2, 32), to = quantized(mxfp8, 2, 32),
                   other = quantized(mxfp8, 2, 32);
    breccia_matrix codes = written(&to);
    breccia_part_bytes sizes = {.size = sizeof sizes};
    turned.transposed = 1;
#define NULL_IS(name, call)                                                                        \
    do {                                                                                           \
        CHECK((call) == BRECCIA_VALUE_ERROR);                                                      \
        CHECK(strstr(breccia_last_message(), name " must not be NULL") == breccia_last_message()); \
    } while (0)
    NULL_IS("name", breccia_recipe_new(NULL, NULL, &recipe));
    NULL_IS("recipe", breccia_recipe_new("mxfp8", NULL, NULL));
    NULL_IS("recipe", breccia_recipe_new(NULL, NULL, NULL));
    NULL_IS("recipe", breccia_part_sizes(NULL, 0, 2, 32, &sizes));
    NULL_IS("sizes", breccia_part_sizes(mxfp8, 0, 2, 32, NULL));
    NULL_IS("sizes", breccia_part_sizes(NULL, 0, 2, 32, NULL));
    NULL_IS("x", breccia_cast(NULL, &to, NULL));
    NULL_IS("out", breccia_cast(&a, NULL, NULL));
    NULL_IS("x", breccia_cast(NULL, NULL, NULL));
    NULL_IS("scaled", breccia_dequantize(NULL, &back));
    NULL_IS("out", breccia_dequantize(&codes, NULL));
    NULL_IS("scaled", breccia_dequantize(NULL, NULL));
    NULL_IS("scaled", breccia_requantize(NULL, &other));
    NULL_IS("out", breccia_requantize(&codes, NULL));
    NULL_IS("scaled", breccia_requantize(NULL, NULL));
    NULL_IS("a", breccia_matmul(NULL, &turned, &out, NULL));
    NULL_IS("b", breccia_matmul(&a, NULL, &out, NULL));
    NULL_IS("out", breccia_matmul(&a, &turned, NULL, NULL));
    NULL_IS("a", breccia_matmul(NULL, NULL, NULL, NULL));
    NULL_IS("x", breccia_linear(NULL, &weight, &bias, &out, NULL));
    NULL_IS("w", breccia_linear(&a, NULL, &bias, &out, NULL));
    NULL_IS("out", breccia_linear(&a, &weight, &bias, NULL, NULL));
    NULL_IS("x", breccia_linear(NULL, NULL, NULL, NULL, NULL));
    NULL_IS("x", breccia_grouped_matmul(NULL, &codes, offsets, &out, NULL));
    NULL_IS("w", breccia_grouped_matmul(&a, NULL, offsets, &out, NULL));
    NULL_IS("offsets", breccia_grouped_matmul(&a, &codes, NULL, &out, NULL));
    NULL_IS("out", breccia_grouped_matmul(&a, &codes, offsets, NULL, NULL));
    NULL_IS("w", breccia_prepare(NULL, &prepared));
    NULL_IS("prepared", breccia_prepare(&codes, NULL));
    CHECK(breccia_linear(&a, &weight, NULL, &out, NULL) == BRECCIA_OK); /* those that may be */

    /* And each pointer of a matrix. */
    bare = codes;
    bare.data = NULL;
    NULL_IS("scaled.data", breccia_dequantize(&bare, &back));
    bare = codes;
    bare.scale = NULL;
    NULL_IS("w.scale", breccia_linear(&a, &bare, NULL, &out, NULL));
    NULL_IS("out.recipe", breccia_cast(&a, &back, NULL));
    out.data = NULL;
    CHECK(breccia_matmul(&a, &turned, &out, NULL) == BRECCIA_VALUE_ERROR);
    out.data = y;
    bare = a;
    bare.data = NULL;
    CHECK(breccia_matmul(&bare, &turned, &out, NULL) == BRECCIA_VALUE_ERROR);
    bare = bias;
    bare.data = NULL;
    CHECK(breccia_linear(&a, &weight, &bare, &out, NULL) == BRECCIA_VALUE_ERROR);
#undef NULL_IS
    free_parts(&to);
    free_parts(&other);
    breccia_recipe_free(mxfp8);
}

int main(void) {
    round_trip("MXFP8BlockScaling", NULL, 0);
    round_trip("mxfp4", NULL, 0);
    round_trip("nvfp4", NULL, 1e-6F);
    round_trip("nvfp4", "two_level=false", 0);
    round_trip("int4", "group_size=32,signed=false,symmetric=false,scale_dtype=fp32", 0.11F);
    round_trip("int8", NULL, 0.01F);
    exponents();
    products();
    batches();
    float_scales();
    options_of_casts();
    sizes_of_structs();
    threads();
    refusals();
    null_pointers();
    printf("breccia %s from C\n", breccia_version());
    return EXIT_SUCCESS;
}
