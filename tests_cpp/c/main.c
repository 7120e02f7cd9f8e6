/* SPDX-License-Identifier: Apache-2.0
 *
 * breccia.h from C11: each verb against arithmetic done here, on values that the formats hold exactly, and what is
 * refused. */
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

enum { M = 3, N = 32, K = 64 };

static breccia_recipe *recipe_of(const char *name, const char *fields) {
    breccia_recipe *recipe = NULL;
    CHECK(breccia_recipe_new(name, fields, &recipe) == BRECCIA_OK && recipe != NULL);
    return recipe;
}

static breccia_matrix numbers(void *data, int64_t rows, int64_t columns) {
    breccia_matrix matrix = {0};
    matrix.dtype = BRECCIA_FLOAT32;
    matrix.rows = rows;
    matrix.columns = columns;
    matrix.data = data;
    return matrix;
}

static void *part(int64_t bytes) { return bytes == 0 ? NULL : calloc(1, (size_t)bytes); }

static breccia_matrix quantized(const breccia_recipe *recipe, int64_t rows, int64_t columns) {
    breccia_matrix matrix = {0};
    breccia_part_bytes sizes;
    CHECK(breccia_part_sizes(recipe, rows, columns, &sizes) == BRECCIA_OK);
    matrix.recipe = recipe;
    matrix.rows = rows;
    matrix.columns = columns;
    matrix.data = part(sizes.data);
    matrix.scale = part(sizes.scale);
    matrix.zero_point = part(sizes.zero_point);
    matrix.global_scale = part(sizes.global_scale);
    return matrix;
}

static void free_parts(breccia_matrix *matrix) {
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
static void by_importance(breccia_matrix *in, breccia_matrix *scaled, breccia_matrix *out) {
    static float h[K];
    breccia_matrix importance = numbers(h, 1, K), two_rows = importance, negative = importance;
    for (int k = 0; k < K; ++k) h[k] = (float)(k % 5);
    CHECK(breccia_cast_by_importance(in, &importance, scaled) == BRECCIA_OK);
    CHECK(breccia_dequantize(scaled, out) == BRECCIA_OK);
    two_rows.rows = 2;
    CHECK(breccia_cast_by_importance(in, &two_rows, scaled) == BRECCIA_VALUE_ERROR);
    CHECK(strstr(breccia_last_message(), "importance must have 1 row") != NULL);
    CHECK(breccia_cast_by_importance(in, NULL, scaled) == BRECCIA_VALUE_ERROR);
    h[3] = -1;
    CHECK(breccia_cast_by_importance(in, &negative, scaled) == BRECCIA_VALUE_ERROR);
}

static void round_trip(const char *name, const char *fields, float tolerance) {
    static float w[N * K], back[N * K];
    breccia_recipe *recipe = recipe_of(name, fields);
    breccia_matrix in = numbers(w, N, K), out = numbers(back, N, K), scaled = quantized(recipe, N, K);
    fill(w, N * K, 3);
    CHECK(breccia_cast(&in, &scaled) == BRECCIA_OK);
    CHECK(breccia_dequantize(&scaled, &out) == BRECCIA_OK);
    for (int i = 0; i < N * K; ++i) CHECK(back[i] - w[i] <= tolerance && w[i] - back[i] <= tolerance);
    by_importance(&in, &scaled, &out);
    for (int i = 0; i < N * K; ++i) CHECK(back[i] - w[i] <= tolerance && w[i] - back[i] <= tolerance);
    free_parts(&scaled);
    breccia_recipe_free(recipe);
}

static void products(void) {
    static float x[M * K], w[N * K], y[M * N], z[M * N], bias[N];
    breccia_recipe *mxfp8 = recipe_of("mxfp8", NULL), *mxfp6 = recipe_of("mxfp6", "fp6_format=E2M3");
    breccia_matrix activations = numbers(x, M, K), weight = numbers(w, N, K), row = numbers(bias, 1, N);
    breccia_matrix result = numbers(y, M, N), other = numbers(z, M, N);
    breccia_matrix scaled = quantized(mxfp8, N, K), again = quantized(mxfp6, N, K), turned;
    fill(x, M * K, 5);
    fill(w, N * K, 3);
    fill(bias, N, 1);
    CHECK(breccia_cast(&weight, &scaled) == BRECCIA_OK);
    CHECK(breccia_linear(&activations, &scaled, &row, &result) == BRECCIA_OK);
    for (int i = 0; i < M; ++i)
        for (int j = 0; j < N; ++j) {
            float sum = bias[j];
            for (int k = 0; k < K; ++k) sum += x[i * K + k] * w[j * K + k];
            CHECK(y[i * N + j] == sum); /* sums of quarters are exact */
        }
    CHECK(breccia_linear(&activations, &scaled, NULL, &result) == BRECCIA_OK);
    turned = scaled;
    turned.transposed = 1;
    CHECK(breccia_matmul(&activations, &turned, &other) == BRECCIA_OK);
    CHECK(memcmp(y, z, sizeof y) == 0);
    turned = weight;
    turned.transposed = 1;
    CHECK(breccia_matmul(&activations, &turned, &other) == BRECCIA_OK);
    CHECK(memcmp(y, z, sizeof y) == 0);

    /* The values survive a change of recipe, and so does the product. */
    CHECK(breccia_requantize(&scaled, &again) == BRECCIA_OK);
    CHECK(breccia_linear(&activations, &again, NULL, &other) == BRECCIA_OK);
    CHECK(memcmp(y, z, sizeof y) == 0);
    free_parts(&scaled);
    free_parts(&again);
    breccia_recipe_free(mxfp8);
    breccia_recipe_free(mxfp6);
}

static void refusals(void) {
    float x[64] = {0};
    breccia_recipe *recipe = NULL, *nvfp4 = recipe_of("nvfp4", "two_level=true");
    breccia_matrix in = numbers(x, 2, 32), out = quantized(nvfp4, 2, 32), changed;
    breccia_part_bytes sizes;
    CHECK(breccia_recipe_new("nvfp5", NULL, &recipe) == BRECCIA_VALUE_ERROR && recipe == NULL);
    CHECK(strstr(breccia_last_message(), "did you mean 'nvfp4'") != NULL);
    CHECK(breccia_recipe_new("nvfp4", "two_level=maybe", &recipe) == BRECCIA_TYPE_ERROR);
    CHECK(strstr(breccia_last_message(), "true or false") != NULL);
    CHECK(breccia_recipe_new("nvfp4", "no_such=1", &recipe) == BRECCIA_TYPE_ERROR);
    CHECK(breccia_recipe_new("nvfp4", "two_level", &recipe) == BRECCIA_VALUE_ERROR);
    CHECK(breccia_recipe_new("nvfp4", "two_level=true,two_level=false", &recipe) == BRECCIA_VALUE_ERROR);
    CHECK(breccia_recipe_new(NULL, NULL, &recipe) == BRECCIA_VALUE_ERROR);
    CHECK(breccia_recipe_new("nvfp4", NULL, NULL) == BRECCIA_VALUE_ERROR);
    CHECK(breccia_part_sizes(nvfp4, -1, 32, &sizes) == BRECCIA_VALUE_ERROR);
    CHECK(breccia_part_sizes(NULL, 1, 32, &sizes) == BRECCIA_VALUE_ERROR);

    CHECK(breccia_cast(NULL, &out) == BRECCIA_VALUE_ERROR && breccia_cast(&in, NULL) == BRECCIA_VALUE_ERROR);
    CHECK(breccia_cast(&in, &in) == BRECCIA_VALUE_ERROR); /* no recipe to cast to */
    CHECK(breccia_cast(&out, &out) == BRECCIA_TYPE_ERROR);
    changed = in;
    changed.dtype = 9;
    CHECK(breccia_cast(&changed, &out) == BRECCIA_TYPE_ERROR);
    changed = in;
    changed.rows = 1;
    CHECK(breccia_cast(&changed, &out) == BRECCIA_VALUE_ERROR);
    changed = in;
    changed.data = NULL;
    CHECK(breccia_cast(&changed, &out) == BRECCIA_VALUE_ERROR);
    changed = in;
    changed.data = (char *)x + 1;
    CHECK(breccia_cast(&changed, &out) == BRECCIA_VALUE_ERROR);
    CHECK(strstr(breccia_last_message(), "x.data must lie at a multiple of 4 bytes, the size of a float32") != NULL);
    changed = out;
    changed.global_scale = (char *)out.global_scale + 2;
    CHECK(breccia_cast(&in, &changed) == BRECCIA_VALUE_ERROR);
    CHECK(strstr(breccia_last_message(), "out.global_scale must lie at a multiple of 4 bytes") != NULL);
    changed = in;
    changed.transposed = 1;
    CHECK(breccia_cast(&changed, &out) == BRECCIA_VALUE_ERROR);
    changed = out;
    changed.global_scale = NULL;
    CHECK(breccia_cast(&in, &changed) == BRECCIA_VALUE_ERROR);
    CHECK(strstr(breccia_last_message(), "out.global_scale must not be NULL") != NULL);
    CHECK(breccia_dequantize(&changed, &in) == BRECCIA_VALUE_ERROR);
    CHECK(breccia_matmul(&in, &in, &in) == BRECCIA_VALUE_ERROR);

    CHECK(breccia_cast(&in, &out) == BRECCIA_OK && strcmp(breccia_last_message(), "") == 0);
    free_parts(&out);
    breccia_recipe_free(nvfp4);
    breccia_recipe_free(NULL);
}

/* Every function with each of its pointers null, the others in order: a status and the name of the pointer, whichever
 * of its arguments a compiler evaluates first. */
static void null_pointers(void) {
    static float x[2 * 32], w[2 * 32], y[2 * 2], row[2];
    breccia_recipe *mxfp8 = recipe_of("mxfp8", NULL), *recipe = NULL;
    breccia_matrix a = numbers(x, 2, 32), weight = numbers(w, 2, 32), turned = weight, bias = numbers(row, 1, 2);
    breccia_matrix out = numbers(y, 2, 2), back = numbers(w, 2, 32), codes = quantized(mxfp8, 2, 32),
                   other = quantized(mxfp8, 2, 32), bare = codes;
    breccia_part_bytes sizes;
    turned.transposed = 1;
#define NULL_IS(name, call)                                                                        \
    do {                                                                                           \
        CHECK((call) == BRECCIA_VALUE_ERROR);                                                      \
        CHECK(strstr(breccia_last_message(), name " must not be NULL") == breccia_last_message()); \
    } while (0)
    NULL_IS("name", breccia_recipe_new(NULL, NULL, &recipe));
    NULL_IS("recipe", breccia_recipe_new("mxfp8", NULL, NULL));
    NULL_IS("recipe", breccia_recipe_new(NULL, NULL, NULL));
    breccia_recipe_free(NULL);
    NULL_IS("recipe", breccia_part_sizes(NULL, 2, 32, &sizes));
    NULL_IS("sizes", breccia_part_sizes(mxfp8, 2, 32, NULL));
    NULL_IS("sizes", breccia_part_sizes(NULL, 2, 32, NULL));
    NULL_IS("x", breccia_cast(NULL, &codes));
    NULL_IS("out", breccia_cast(&a, NULL));
    NULL_IS("x", breccia_cast(NULL, NULL));
    NULL_IS("scaled", breccia_dequantize(NULL, &back));
    NULL_IS("out", breccia_dequantize(&codes, NULL));
    NULL_IS("scaled", breccia_dequantize(NULL, NULL));
    NULL_IS("scaled", breccia_requantize(NULL, &other));
    NULL_IS("out", breccia_requantize(&codes, NULL));
    NULL_IS("scaled", breccia_requantize(NULL, NULL));
    NULL_IS("a", breccia_matmul(NULL, &turned, &out));
    NULL_IS("b", breccia_matmul(&a, NULL, &out));
    NULL_IS("out", breccia_matmul(&a, &turned, NULL));
    NULL_IS("a", breccia_matmul(NULL, NULL, NULL));
    NULL_IS("x", breccia_linear(NULL, &weight, &bias, &out));
    NULL_IS("w", breccia_linear(&a, NULL, &bias, &out));
    NULL_IS("out", breccia_linear(&a, &weight, &bias, NULL));
    NULL_IS("x", breccia_linear(NULL, NULL, NULL, NULL));
    CHECK(breccia_linear(&a, &weight, NULL, &out) == BRECCIA_OK); /* the one that may be */

    /* And each pointer of a matrix. */
    bare.data = NULL;
    NULL_IS("scaled.data", breccia_dequantize(&bare, &back));
    bare = codes;
    bare.scale = NULL;
    NULL_IS("w.scale", breccia_linear(&a, &bare, NULL, &out));
    NULL_IS("out.recipe", breccia_cast(&a, &back));
    bare = out;
    bare.data = NULL;
    CHECK(breccia_matmul(&bare, &out, &out) == BRECCIA_VALUE_ERROR);
    CHECK(breccia_matmul(&a, &turned, &bare) == BRECCIA_VALUE_ERROR);
    bare = bias;
    bare.data = NULL;
    CHECK(breccia_linear(&a, &weight, &bare, &out) == BRECCIA_VALUE_ERROR);
#undef NULL_IS
    free_parts(&codes);
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
    products();
    refusals();
    null_pointers();
    printf("breccia %s from C\n", breccia_version());
    return EXIT_SUCCESS;
}
