#!/bin/bash -eu
# The service's own compiler, sanitizer flags and engine (LIB_FUZZING_ENGINE) make the fuzzers of tests_cpp/fuzz.
cmake -S . -B "$WORK/build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-g1 \
    -DBRECCIA_BUILD_FUZZERS=ON -DBRECCIA_ONLY_PORTABLE=ON
cmake --build "$WORK/build"
python3 tests_cpp/fuzz/make_corpus.py "$WORK/corpus"
for name in codecs tensors c_abi; do
    cp "$WORK/build/tests_cpp/fuzz/fuzz_$name" "$OUT/"
    (cd "$WORK/corpus/$name" && zip -q "$OUT/fuzz_${name}_seed_corpus.zip" ./*)
done
