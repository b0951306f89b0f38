from hf_specgen.commands.train_with_generation_eval import main

if __name__ == "__main__":
    main()
